"""The error for too little memory names what is left over as the length that would fit.

It subtracts where it should say the number. Whoever follows it sets a maximum that fits nothing, or
far too little. An error about a limit must name the limit: vllm-project/vllm#33418.
"""

SYMPTOM = "160 tokens fit, 200 are asked for, and the error says that 40 would fit"
KILLED_BY = (
    "test_config.py::test_the_error_names_the_length_that_would_fit",
    "test_config.py::test_the_error_speaks_of_the_tightest_worker",
)


def apply(stage):
    error = stage.NotEnoughMemory
    library_init = error.__init__

    def __init__(self, needed, available, limits, max_model_len):
        library_init(self, needed, available, limits, limits.max_model_len - max_model_len)

    error.__init__ = __init__
