from tests.golden.curves import main


main()
