"""Components in other languages, by Storm's multilang protocol."""
