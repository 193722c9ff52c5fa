"""Files that the package carries: recorded traces in `traces/`, each with its note and licence."""
