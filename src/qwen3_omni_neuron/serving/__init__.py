"""The server: OpenAI's API over HTTP, over the package's public API alone.

An endpoint is a module: `serving.chat`, `serving.speech`, `serving.transcriptions`,
`serving.listing`, `serving.health`. `serving.app` puts
them together; `serving.gate` stands before all of them and has the keys and limits;
`serving.server` runs the event loop, loads the model and ends it. Nothing here knows of engines.
"""
