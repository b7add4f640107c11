"""Runs the named test files; fails when they hold no test."""

import sys
import unittest

if __name__ == "__main__":
    tests = unittest.defaultTestLoader.loadTestsFromNames(sys.argv[1:])
    result = unittest.TextTestRunner(verbosity=2).run(tests)
    sys.exit(0 if result.wasSuccessful() and result.testsRun > 0 else 1)
