"""Views of what runs have left: metrics, comparisons, figures, reports, tracking."""
