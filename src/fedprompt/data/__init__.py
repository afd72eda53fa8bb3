"""Images, and which client holds which of them: sources -> partition -> manifest. No method or engine is known here."""
