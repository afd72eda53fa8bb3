"""Images, and which client holds which of them: sources -> partition -> manifest. Does not import methods or engines."""
