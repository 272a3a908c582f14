"""Results of a run: a text sample, the picture of the loss, and exported weights. All ranks call
each function."""

from dataclasses import asdict
from pathlib import Path

from torch import nn

from meshtrain.config import Config
from meshtrain.data import OpenData
from meshtrain.data.batch import LANGUAGE
from meshtrain.errors import printable
from meshtrain.generate import generate
from meshtrain.job.locate import model_file
from meshtrain.job.process import Job
from meshtrain.mesh import Mesh
from meshtrain.metrics.plot import plot_loss
from meshtrain.parallel.linear.lora import merge_adapters
from meshtrain.parallel.mixed_precision import compute_dtype
from meshtrain.run.setup import context_parallel
from meshtrain.run.weights_export import export

PROMPT_TOKENS = 16  # of held-out text, which the generated sample continues


def show(
    config: Config, job: Job, mesh: Mesh, data: OpenData, model: nn.Module, folder: Path
) -> None:
    """Prints a text by a language model, and draws the loss in the run's folder."""
    if data.tokenizer is not None and config.train.sample_tokens > 0:
        job.say(sample_text(config, job, mesh, data, model))
    if job.rank == 0:
        print(plot_loss(folder, config.name), flush=True)


def sample_text(config: Config, job: Job, mesh: Mesh, data: OpenData, model: nn.Module) -> str:
    """Text that the model generates to continue the beginning of a held-out sample."""
    assert data.tokenizer is not None
    inputs, _ = (data.validation or data.train).item(0, 0)
    assert inputs[0] is not None  # the tokens
    if len(inputs) > len(LANGUAGE) or inputs[0].is_floating_point():
        return (
            f"no sample: one is made of {', '.join(LANGUAGE)} alone, and the data give the model "
            "other inputs"
        )
    prompt = inputs[0][:PROMPT_TOKENS].tolist()
    context = context_parallel(config, mesh) if mesh.size("cp") > 1 else None
    ids = generate(
        model,
        prompt,
        config.train.sample_tokens,
        seq_len=len(inputs[0]),
        device=job.device,
        seed=config.train.seed,
        context=context,
    )
    beginning = data.tokenizer.decode(prompt)
    whole = data.tokenizer.decode(ids)
    return f"\na sample, going on from {beginning!r}:\n{printable(whole)}\n"


def write_export(config: Config, job: Job, mesh: Mesh, model: nn.Module, folder: str) -> None:
    """Exports the weights in the dtype in which blocks compute; adapters are merged into them."""
    merge_adapters(model)  # in place: the run is over
    module = model_file(config.model.name)
    described = None
    if hasattr(module, "to_hugging_face"):
        described = module.to_hugging_face(module.Config(**config.model.keys))
    export(
        model,
        folder,
        job,
        mesh,
        dtype=compute_dtype(config.train.precision),
        config=described,
        tokenizer=None if config.data.tokenizer == "bytes" else config.data.tokenizer,
        data=asdict(config.data),
        weights=config.model.weights,
    )
    job.say(f"weights in {folder}")
