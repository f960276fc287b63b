"""Terms shared by all packages: sites, dims, dtypes, errors, formatting. Imports neither torch nor any other tapscope
package."""
