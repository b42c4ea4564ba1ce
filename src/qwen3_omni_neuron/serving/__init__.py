"""HTTP server with OpenAI's API, built on the package's public API alone.

`endpoints` has a module for each endpoint, `page` the page for conversations, `reference` that of
all endpoints; `app` combines them. `edge` faces the network: its `gate` checks keys and limits of
every request first. `openai` has the shapes of bodies, `kept` objects that later requests may name.
`server` runs the event loop, loads the model and ends it.
"""
