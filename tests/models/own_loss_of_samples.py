"""The weighted tokens of tools/examples/losses, where each sample counts 1."""

from meshtrain.job.locate import model_file

example = model_file("tools/examples/losses/weighted_tokens.py")
Config, Model, check, loss = example.Config, example.Model, example.check, example.loss
init_plan, tp_plan, cp_plan = example.init_plan, example.tp_plan, example.cp_plan
