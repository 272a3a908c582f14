"""`python -m meshtrain.operate.doctor`, as the first edition had it: `python -m meshtrain.doctor`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("meshtrain.doctor", run_name="__main__", alter_sys=True)
