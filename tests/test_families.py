"""A dozen families of docs/transformers.md are on each layout what its table says."""

import sys

import pytest

from tests.launching import run

FAMILIES = (
    "llama",
    "gpt2",
    "gemma2",  # soft caps, windows, a scaled and tied embedding
    "phi3",  # fused queries, keys and values
    "olmo2",  # a norm over all heads
    "falcon",  # attention of its own, tuples between layers
    "bert",  # an encoder that is used as a decoder
    "mixtral",
    "gpt_oss",  # sinks, experts with biases
    "deepseek_v3",  # latent attention
    "mamba",
    "qwen3_next",  # some layers attend, others carry a state
)

# On two of the layouts, in a minute or two.
COMMAND = (sys.executable, "-m", "tools.families", "--layouts", "pp", "cp", "--check")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_families_are_what_the_table_says() -> None:
    """In one process, which imports transformers once."""
    run([*COMMAND, *FAMILIES], timeout=800).check()
