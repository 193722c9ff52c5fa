"""The workflow for public hosting: it runs targets that exist, on the Pythons that the package
claims."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
JOB = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["test"]


def test_targets_exist() -> None:
    commands = "\n".join(step.get("run", "") for step in JOB["steps"])
    targets = re.findall(r"^make (\S+)$", commands, re.MULTILINE)
    assert {"demo", "test", "check"} <= set(targets)
    for target in targets:
        dry = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert dry.returncode == 0, dry.stderr


def test_pythons_are_those_that_the_package_claims() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claim = re.compile(r"Programming Language :: Python :: (3\.\d+)")
    claimed = {match[1] for match in map(claim.fullmatch, project["classifiers"]) if match}
    assert {row["python"] for row in JOB["strategy"]["matrix"]["include"]} == claimed
    assert project["requires-python"] == f">={min(claimed, key=lambda v: int(v[2:]))}"
