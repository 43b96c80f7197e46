"""OpenAI's API of responses, over the code of chat completions."""
