"""Remote references: values that stay where they are, counted wherever they are known."""
