"""The results of tasks, sweeps and comparisons, declared once for terminal, page and tracker."""
