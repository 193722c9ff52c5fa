"""A real model answers prompts through a cache of this book, and the cache is drawn."""

from pagedattn.demo.commands import (
    add_demo_arguments,
    add_generate_arguments,
    run_demo,
    run_generate,
)

__all__ = ["add_demo_arguments", "add_generate_arguments", "run_demo", "run_generate"]
