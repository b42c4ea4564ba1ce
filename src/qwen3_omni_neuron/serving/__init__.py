"""HTTP server with OpenAI's API, built on the package's public API.

`endpoints` has a module per endpoint, `page` the page for conversations, `reference` the page of
all endpoints; `app` combines them. `edge` faces the network: its `gate` first checks every
request's key and limits. `openai` has the shapes of bodies, `kept` objects that later requests may
name. `server` runs the event loop, loads the model and closes it.
"""
