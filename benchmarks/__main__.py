"""Entry of `make bench`."""

from benchmarks.step import main

if __name__ == "__main__":
    main()
