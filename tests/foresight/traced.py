"""Small configs whose steps are traced and compared with real ones."""

BATCH = ("batch.global_size=8", "batch.micro_size=2", "parallel.verify=false")
LLAMA = (
    "model.hidden_size=48",
    "model.intermediate_size=112",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "data.seq_len=32",
    *BATCH,
)
# The configs, with overrides that make them small.
SMALL = {
    "configs/quickstart.yaml": LLAMA,
    "configs/moe.yaml": ("model.num_hidden_layers=2", "data.seq_len=32", *BATCH),
    "configs/digits.yaml": BATCH,
}
