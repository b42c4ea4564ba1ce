"""HTTP server with OpenAI's API, built on the package's public API alone.

Each endpoint has a module: `serving.chat`, `serving.speech`, `serving.transcriptions`,
`serving.listing`, `serving.health`, `serving.page`. `serving.app` combines them;
`serving.gate` handles every request first and checks keys and limits;
`serving.server` runs the event loop, loads the model and ends it. Nothing here uses engines.
"""
