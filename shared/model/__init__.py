"""What a model is, by name and by its files' metadata, without any weight. No torch here."""
