"""The command line: `pagedattn COMMAND …`. Each command is imported only when it is asked for."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

Run = Callable[[Namespace], object]


def _demo(parser: ArgumentParser) -> Run:
    from pagedattn.demo import add_demo_arguments, run_demo

    add_demo_arguments(parser)
    return run_demo


def _generate(parser: ArgumentParser) -> Run:
    from pagedattn.demo import add_generate_arguments, run_generate

    add_generate_arguments(parser)
    return run_generate


def _trace(parser: ArgumentParser) -> Run:
    from pagedattn.bench.waste import add_arguments, run

    add_arguments(parser)
    return run


def _replay(parser: ArgumentParser) -> Run:
    from pagedattn.replay import add_arguments, run

    add_arguments(parser)
    return run


def _bench(parser: ArgumentParser) -> Run:
    from pagedattn.bench import (
        first_token,
        generate,
        kernels,
        manager,
        pool,
        prefix,
        sharing,
        survey,
    )

    measurements = parser.add_subparsers(metavar="MEASUREMENT", required=True)
    for name, summary, module in (
        ("generate", "tokens per second against transformers", generate),
        ("waste", "every policy on recorded traces: memory used, requests at a time", survey),
        ("sharing", "blocks saved when samples or beams share them, on recorded lengths", sharing),
        ("prefix", "prompt tokens that the cache holds already, on recorded prompts", prefix),
        ("first_token", "time to the first token, without and with a hit", first_token),
        ("pool", "the pool, the hasher and four free queues by the clock", pool),
        ("manager", "the manager of many requests by the clock, beside vLLM's", manager),
        ("kernels", "the kernels on a GPU, beside the machine's limits and peers", kernels),
    ):
        measurement = measurements.add_parser(name, help=summary, description=summary)
        module.add_arguments(measurement)
        measurement.set_defaults(measure=module.run)
    return lambda args: args.measure(args)


def _book(parser: ArgumentParser) -> Run:
    from pagedattn.book.build import add_arguments, run

    add_arguments(parser)
    return run


def _exercises(parser: ArgumentParser) -> Run:
    from pagedattn.course.check import add_exercises_arguments, run_exercises

    add_exercises_arguments(parser)
    return run_exercises


def _figures(parser: ArgumentParser) -> Run:
    from pagedattn.course.check import run_figures

    return run_figures


def _compile(parser: ArgumentParser) -> Run:
    from pagedattn.kernels.compiled import add_arguments, run

    add_arguments(parser)
    return run


def _check(parser: ArgumentParser) -> Run:
    from pagedattn.course.check import run_check

    return run_check


def _evidence(parser: ArgumentParser) -> Run:
    from pagedattn.course.evidence import run_evidence

    return run_evidence


COMMANDS: dict[str, tuple[str, Callable[[ArgumentParser], Run]]] = {
    "demo": ("watch the model answer through the paged cache", _demo),
    "generate": ("answer prompts, on any stage or on your own code", _generate),
    "trace": ("replay a recorded trace: how much reserved memory is used", _trace),
    "replay": ("does a manager answer as the recorded one did?", _replay),
    "bench": ("measure: speed, memory", _bench),
    "exercises": ("write the students' files and refresh the code in the texts", _exercises),
    "figures": ("draw the figures again", _figures),
    "book": ("build the book", _book),
    "evidence": ("run the chapters' tests on a GPU and record the result", _evidence),
    "compile": ("compile the kernels for an H200: registers, spills, shared memory", _compile),
    "check": ("is all that is generated current?", _check),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, or 1 when it found something wrong, or 2 for wrong input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except Exception as error:
        from pagedattn.course.tasks import unfinished_task

        if todo := unfinished_task(error):
            print(f"to do: {todo}", file=sys.stderr)
        elif isinstance(error, ValueError | OSError):
            print(f"pagedattn: error: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            raise
        return 2
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    args = build_parser(arguments).parse_args(arguments)
    return int(args.run(args) or 0)


def build_parser(arguments: Sequence[str]) -> ArgumentParser:
    """The parser, with the options of that command alone which `arguments` name."""
    parser = ArgumentParser(prog="pagedattn", description="PagedAttention, a textbook that runs.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (summary, prepare) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in arguments[:1]:
            command.set_defaults(run=prepare(command))
    return parser
