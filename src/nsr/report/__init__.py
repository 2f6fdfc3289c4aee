"""Results to tables with the paper's numbers beside ours, figures, and one page."""
