"""`python -m meshtrain.operate.doctor`, the command of the first edition: runs `python -m
meshtrain.doctor`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("meshtrain.doctor", run_name="__main__", alter_sys=True)
