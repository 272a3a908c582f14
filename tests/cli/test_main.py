"""What holds of every command, and the console script around them."""

import argparse
import importlib.metadata
import json
import shlex
import socket
import subprocess
import sys

import pytest
import torch

from meshtrain.cli.main import COMMANDS, main


def test_help_has_an_example_that_the_command_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for name, (module_name, _, example) in COMMANDS.items():
        with pytest.raises(SystemExit, match=r"^0$"):
            main([name, "--help"])
        output = capsys.readouterr().out
        assert example.split()[:2] == ["meshtrain", name]
        assert f"example:\n  {example}\n" in output
        assert max(map(len, output.splitlines())) <= 80, name
        parser = argparse.ArgumentParser()
        module = importlib.import_module(module_name)
        module.add_arguments(parser)
        words = shlex.split(example.partition(" > ")[0])[2:]
        if getattr(module, "HAS_ACTIONS", False):
            parser.parse_args(words)
        else:
            parser.parse_intermixed_args(words)


def test_the_overview_fits_a_terminal_and_names_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in ([], ["--help"], ["-h"]):
        assert main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        assert {line.split()[0] for line in lines if line.startswith("  ")} == set(COMMANDS)
        assert all(about in " ".join(lines) for _, about, _ in COMMANDS.values())


def test_words_that_are_no_command_or_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plam"]) == 2
    assert capsys.readouterr().err == "meshtrain has no command 'plam' (did you mean plan?)\n"
    assert main(["train"]) == 2
    assert "there are: new, plan, search" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["plan", "quickstart", "--host", "4"])


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"meshtrain": "1.2.3"}.__getitem__)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "meshtrain 1.2.3\n"


def test_a_reader_that_has_seen_enough() -> None:
    command = [
        sys.executable,
        "-m",
        "meshtrain.cli",
        "plan",
        "quickstart",
        "layout={dp_shard: 2000}",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_info_tells_what_a_bug_report_needs_and_no_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert main(["info", "--json"]) == 0
    text = capsys.readouterr().out
    facts = json.loads(text)
    assert any(version.startswith("torch 2.") for version in facts["versions"])
    assert "NCCL_DEBUG=INFO" in facts["environment"]
    assert "gloo" in facts["backends"]
    assert "10.1.2.3" not in text
    assert "secret" not in text
    assert f'"{socket.gethostname()}"' not in text
    assert facts["warnings"] == []
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    assert main(["info"]) == 0
    assert "torch 9.9.0 was not tested" in (printed := capsys.readouterr().out)
    assert "open files" in printed
