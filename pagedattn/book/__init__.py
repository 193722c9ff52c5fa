"""The book: Markdown chapters with formulas, figures and checked code, rendered by mdBook."""
