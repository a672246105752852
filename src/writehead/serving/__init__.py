"""An HTTP server: LibreTranslate, DeepL, OpenAI and our own API over one scheduler per model."""
