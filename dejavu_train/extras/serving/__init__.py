"""A server that speaks OpenAI's protocol: requests wait in a line and share the steps of one engine.

`requests` reads what is asked, `line` owns the engine, `text` makes text of tokens, `replies` writes what comes back,
`app` joins them. FastAPI and uvicorn do the HTTP.
"""
