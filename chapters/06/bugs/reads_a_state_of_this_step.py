"""A state that was registered in this step is hit in this step.

K and V can be shared at once, since a layer writes those of the whole step before it reads any. A
state is read at the beginning of the step, when it is not there yet: vllm-project/vllm#29387.
"""

SYMPTOM = "of two equal prompts in one step, the second starts from a state of zeros"
KILLED_BY = (
    "test_mamba.py::test_a_state_of_this_step_has_to_wait",
    "test_coordinator.py::test_a_step_has_to_pass_before_states_are_read",
)


def apply(stage):
    stage.MambaManager.cache_blocks = stage.SingleTypeKVCacheManager.cache_blocks
