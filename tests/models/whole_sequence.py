"""A Llama whose embedding and head are not split, so that nothing splits the sequence over
ranks."""

from meshtrain.job.locate import model_file

llama = model_file("llama")
Config, Model, init_plan = llama.Config, llama.Model, llama.init_plan
tp_plan = {name: style for name, style in llama.tp_plan.items() if name.startswith("model.layers.")}
