"""`meshtrain doctor`: is everything in place for this job on these nodes, and if not, what is wrong and what mends it.

It is run where torchrun would be, with torchrun's own options, on every node: torchrun starts no worker while a node
is missing, so a check inside of the workers could never say who is. From the top:

    command      the page that everything is on
    report       what people and programs read
    findings     PURE  what all nodes know -> what is wrong with it, and the fix (rules_*.py, one per subject)
    collectives  times the collectives of the layout, in processes of their own (worker.py)
    meeting      the nodes meet at the endpoint and exchange what they know (wire.py: JSON lines over sockets;
                 dial.py: connections, and why there is none)
    beacon       who else runs a doctor nearby, and where it goes
    facts        what a host can say of itself (files.py, ports.py, machine.py, nccl.py: parts of it)
    transport    PURE  by what data goes from GPU to GPU, and which variables switch that
    interfaces   PURE  which network interface NCCL and gloo take
    options      PURE  torchrun's options, or SLURM's variables, as a place where to meet
    record       PURE  the facts as dataclasses, to JSON and back
"""
