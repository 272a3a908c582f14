"""The first edition's place of the doctor."""
