// The API's reference: Swagger UI on the published document. Its validator, on a host of somebody else, is not asked.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  validatorUrl: null,
});
