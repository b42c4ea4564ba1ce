"""HTTP server with OpenAI's API, built on the package's public API alone.

`serving.endpoints` has a module for each endpoint, `serving.page` the page for conversations, and
`serving.reference` that of all endpoints; `serving.app` combines them. `serving.edge` faces the
network: its `gate` handles every request first and checks keys and limits. `serving.openai` has the
shapes of bodies, and `serving.kept` what later requests may name. `serving.server` runs the event
loop, loads the model and ends it. Nothing here uses engines.
"""
