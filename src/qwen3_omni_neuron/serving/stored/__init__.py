"""Files of sessions and spoken replies, encrypted and bounded."""
