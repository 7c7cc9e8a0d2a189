"""The server: OpenAI's API over one `AsyncLLM`; needs the extra ``serve``."""
