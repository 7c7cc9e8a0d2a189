"""An HTTP server with OpenAI's API for one `AsyncLLM`; needs the extra ``serve``."""
