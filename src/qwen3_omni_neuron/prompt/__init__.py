"""Messages of a conversation -> the prompt: token ids, media, positions and talker rows."""
