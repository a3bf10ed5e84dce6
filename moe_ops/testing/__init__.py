"""What the project's own tests use and a user's may: comparison of bits and fresh inputs."""

from .bits import bit_mismatches, bits_equal
from .inputs import SharedExpertInputs, shared_expert_inputs

__all__ = ["SharedExpertInputs", "bit_mismatches", "bits_equal", "shared_expert_inputs"]
