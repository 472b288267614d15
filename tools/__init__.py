"""Programs of this repository: set-up, the index of errors, the site, all suites."""
