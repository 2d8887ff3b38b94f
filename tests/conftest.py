import os

# Some virtual machines advertise AMX and then refuse its instructions: bf16 on CPU would end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
