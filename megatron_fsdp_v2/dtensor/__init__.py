"""DTensors whose rows are sharded unevenly."""
