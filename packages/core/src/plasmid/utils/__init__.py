"""Files, texts and servers that are not trusted, deadlines, and other helpers without a room of their own."""
