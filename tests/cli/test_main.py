"""What holds of every command: an example that its parser takes, and completion by a shell."""

import argparse
import importlib
import json
import shlex
import subprocess
from pathlib import Path

import pytest

from meshtrain.cli.main import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_the_command_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module_name, _, example = COMMANDS[name]
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    output = capsys.readouterr().out
    assert example.split()[:2] == ["meshtrain", name]
    assert f"example:\n  {example}\n" in output
    assert max(map(len, output.splitlines())) <= 80
    parser = argparse.ArgumentParser()
    module = importlib.import_module(module_name)
    module.add_arguments(parser)
    words = shlex.split(example.partition(" > ")[0])[2:]
    if getattr(module, "HAS_ACTIONS", False):
        parser.parse_args(words)
    else:
        parser.parse_intermixed_args(words)


def test_bash_completes_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    ask = f"source {script}; COMP_WORDS=(meshtrain pl); COMP_CWORD=1; _shtab_meshtrain; echo ${{COMPREPLY[@]}}"
    assert subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout.split() == ["plan"]


def test_info_tells_what_a_bug_report_needs_and_no_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

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
    assert main(["info"]) == 0
    assert "open files" in capsys.readouterr().out


def test_the_overview_fits_a_terminal_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines if line.startswith("  ")} == set(COMMANDS)
