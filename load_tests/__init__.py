"""Load tests over the OpenAI API: `python -m load_tests.run`."""
