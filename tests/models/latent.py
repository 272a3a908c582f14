"""A DeepSeek-V3 without experts, since tensor parallelism without sequence parallelism does not
support experts."""

from meshtrain.job.locate import model_file

deepseek = model_file("deepseek_v3")
Config, tp_plan, cp_plan, init_plan = (
    deepseek.Config,
    deepseek.tp_plan,
    deepseek.cp_plan,
    deepseek.init_plan,
)


class Model(deepseek.Model):
    pass
