"""The command line: each command reaches its module, and wrong input is one line."""

import subprocess
import sys
from pathlib import Path

import pytest

import pagedattn.demo
from pagedattn import cli
from pagedattn.cli import main

COMMANDS = ["demo", "generate", "trace", "bench", "exercises", "figures", "book", "check"]


def test_help_names_every_command_and_imports_none():
    code = (
        "import sys\nfrom pagedattn.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "stage = 'pagedattn.prefix.'  # `import pagedattn` gives the last stage\n"
        "inner = [m for m in sys.modules if m.startswith('pagedattn.') and m.count('.') > 1]\n"
        "print([m for m in inner if not m.startswith(stage)])\n"
        "print('pagedattn.demo' in sys.modules, 'pagedattn.traces' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    for command in COMMANDS:
        assert f"    {command}" in said
    assert said.splitlines()[-2:] == ["[]", "False False"]


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        (["generate", "--help"], "--prompt"),
        (["trace", "--help"], "--block-size"),
        (["bench", "--help"], "generate"),
        (["bench", "generate", "--help"], "--new-tokens"),
        (["bench", "waste", "--help"], "--block-sizes"),
        (["bench", "sharing", "--help"], "--requests"),
        (["bench", "prefix", "--help"], "--capacities"),
        (["bench", "first_token", "--help"], "--prompt-tokens"),
        (["bench", "pool", "--help"], "--rounds"),
        (["book", "--help"], "--out"),
        (["exercises", "--help"], "--force"),
        (["check", "--help"], "current"),
    ],
)
def test_each_command_has_its_options(arguments, usage, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert f"usage: pagedattn {' '.join(arguments[:-1])}" in said
    assert usage in said


@pytest.mark.parametrize("arguments", [[], ["dance"], ["bench"], ["exercises", "--hard"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: pagedattn" in capsys.readouterr().err


def test_a_trace_is_replayed(capsys, tmp_path):
    trace = tmp_path / "tiny.csv"
    trace.write_text("input_length,output_length\n5,3\n8,2\n")
    assert main(["trace", str(trace), "--slots", "8192"]) == 0
    assert "tiny.csv" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["trace", "nowhere.csv"], "nowhere.csv"),
        (["generate", "--bug", "no_such"], "unknown bug no_such; known: "),
        (["generate", "--stage", "99"], "unknown stage 99; known: 01, 02"),
        (["generate", "--impl", "nowhere.py"], "there is no file nowhere.py"),
    ],
)
def test_wrong_input_is_one_line(arguments, why, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("pagedattn: error: ")
    assert why in said
    assert said.count("\n") == 1


def test_a_file_that_cannot_be_imported(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("import torch\nimport no_such_module\n")
    assert main(["generate", "--impl", str(path)]) == 2
    said = capsys.readouterr().err
    assert "mine.py, line 2, cannot be imported: ModuleNotFoundError: No module" in said
    assert said.count("\n") == 1


def stop(error: BaseException):
    def run(args):
        raise error

    return run


def test_an_unfinished_task_is_to_do(capsys, monkeypatch):
    todo = NotImplementedError("task 2.3: find the slot")
    monkeypatch.setattr(pagedattn.demo, "run_demo", stop(todo))
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "to do: task 2.3: find the slot\n"


def test_an_unfinished_kernel_is_to_do(capsys, monkeypatch):
    """Triton's interpreter wraps what a kernel raises."""
    wrapped = RuntimeError("a kernel failed")
    wrapped.__cause__ = NotImplementedError("task 5.2: walk the keys")
    monkeypatch.setattr(pagedattn.demo, "run_demo", stop(wrapped))
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "to do: task 5.2: walk the keys\n"


def test_a_mistake_in_the_program_keeps_its_traceback(monkeypatch):
    for error in (NotImplementedError("not here"), IndexError("list index out of range")):
        monkeypatch.setattr(pagedattn.demo, "run_demo", stop(error))
        with pytest.raises(type(error)):
            main(["demo"])


def test_a_long_message_becomes_one_line(capsys, monkeypatch):
    monkeypatch.setattr(pagedattn.demo, "run_demo", stop(ValueError("two\n  lines")))
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "pagedattn: error: two lines\n"


def test_an_interrupt_is_quiet(capsys, monkeypatch):
    monkeypatch.setattr(pagedattn.demo, "run_demo", stop(KeyboardInterrupt()))
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == ""


def test_the_exit_code_is_the_commands(monkeypatch):
    for answer, code in ((None, 0), (0, 0), (1, 1)):
        monkeypatch.setattr(pagedattn.demo, "run_demo", lambda args, answer=answer: answer)
        assert main(["demo"]) == code


def test_as_a_module():
    assert Path(cli.__file__).with_name("__main__.py").is_file()
    done = subprocess.run(
        [sys.executable, "-m", "pagedattn", "dance"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "invalid choice: 'dance'" in done.stderr
