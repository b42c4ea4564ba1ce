"""Messages of a conversation -> the prompt: template, media, positions and talker rows."""
