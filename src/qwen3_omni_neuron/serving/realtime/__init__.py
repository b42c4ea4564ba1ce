"""/v1/realtime: speech in and out over a WebSocket, in the events of OpenAI's Realtime API."""
