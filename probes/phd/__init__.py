"""PhD: yes/no questions beside a misleading text."""
