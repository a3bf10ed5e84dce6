"""What the project's own tests use and a user's may: comparison of bits and fresh inputs."""

from .bits import bit_mismatches, bits_equal
from .inputs import MegaMoEInputs, SharedExpertInputs, mega_moe_inputs, shared_expert_inputs

__all__ = [
    "MegaMoEInputs",
    "SharedExpertInputs",
    "bit_mismatches",
    "bits_equal",
    "mega_moe_inputs",
    "shared_expert_inputs",
]
