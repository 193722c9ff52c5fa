"""What a student uses: tasks, exercises, whose code the tests run on, bugs, predictions."""
