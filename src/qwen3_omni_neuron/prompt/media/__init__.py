"""Media of messages: audio, images and videos, read and prepared for the encoders."""
